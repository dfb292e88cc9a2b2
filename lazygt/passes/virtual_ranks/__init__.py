"""Programs of virtual ranks, which become those of the workers that stand for them."""
