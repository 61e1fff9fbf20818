"""Send the records of a run to Weights & Biases or MLflow, from a process of its own that the run does not know."""
