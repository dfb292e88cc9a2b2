"""Recovery: a killed worker costs only time; runs are kept until their results are copied."""
