"""Where the elements of a tensor lie on a rank: spans."""
