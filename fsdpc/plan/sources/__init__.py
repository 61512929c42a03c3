"""What a ledger is made from: formulas, traces on fake tensors, and what a run holds."""
