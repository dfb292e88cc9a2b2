"""Which formula torch takes: the one that eager torch takes on the workers' device."""
