"""Merge of the programs of virtual ranks into those of the workers that stand for them."""
