"""Reference executions of a spec and of a plan, in torch."""
