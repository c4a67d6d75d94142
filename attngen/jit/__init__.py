"""From a generated file to a callable: fingerprint, cache, compilation, launch. Only here torch and the DSL are met."""
