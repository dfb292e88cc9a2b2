"""The compiled tier: fused nodes lowered by Inductor, in a separate process."""
