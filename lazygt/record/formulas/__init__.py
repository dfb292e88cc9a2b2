"""torch's choice of formulas: the one that eager torch makes on the workers' device."""
