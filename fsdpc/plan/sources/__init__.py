"""The sources of a ledger: formulas, traces on fake tensors, and the memory of a run."""
