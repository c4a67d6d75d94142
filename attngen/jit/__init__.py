"""From a generated file to a callable: fingerprint, cache, compilation, launch. The only place that meets torch and the DSL."""
