"""What users say of a mesh: how values and modules lie on it, and in which stages they run."""
