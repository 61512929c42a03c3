"""The base of both front ends: units, trees of units, and tensors over the engine's memory."""
