"""Sharding: placements chosen for one mesh axis after another, and each rank's program.

Four drawers lead from annotations to local programs: ``rules`` lists the strategies of each op,
``propagate`` opens those that annotations lead to, ``choose`` finds the cheapest of these, and
``lower`` writes the local programs. ``axis`` opens the drawers for each mesh axis; ``programs``
runs all passes.
"""
