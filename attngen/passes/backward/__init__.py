"""The planners of the backward: one module a slot, as in `attngen.passes`."""
