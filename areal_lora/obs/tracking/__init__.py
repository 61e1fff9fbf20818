"""Send the records of a run to a tracker, from a process of its own that the run does not know."""
