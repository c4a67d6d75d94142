"""The planners of the backward: one module a section of the plan, as in `attngen.passes`."""
