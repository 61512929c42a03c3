"""State dicts: FULL, SHARDED and LOCAL."""
