"""How a model is sharded over the tensor axis and partitioned over the pipeline axis."""
