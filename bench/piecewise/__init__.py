"""What eager breaks cost, and the mixed batches that only they can serve; not the arms, which `arms` has."""
