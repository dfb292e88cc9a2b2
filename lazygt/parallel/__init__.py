"""Users' sharding API: placements of values and modules on the mesh, and stages."""
