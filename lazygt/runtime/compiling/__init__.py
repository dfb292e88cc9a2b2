"""The compiled tier: fused nodes lowered by Inductor, in a process of their own."""
