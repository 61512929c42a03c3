"""An optimizer's state as a table by the names of parameters."""
