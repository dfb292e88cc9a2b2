"""Sharding: placements chosen for one mesh axis after another, and each rank's program.

From annotations to local programs, in four drawers: ``rules`` lists the strategies of each op,
``propagate`` opens those that annotations lead to, ``choose`` takes the cheapest of these, ``lower``
writes the local programs. ``axis`` runs them for each mesh axis, ``programs`` with all other passes.
"""
