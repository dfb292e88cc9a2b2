"""Sharding: placements chosen for one mesh axis after another."""
