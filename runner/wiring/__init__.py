"""From a job spec to live objects: the only room that knows the concrete classes together."""
