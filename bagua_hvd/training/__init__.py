"""What is trained, as algorithms see it: buckets of memory, the model, what is kept from step to step."""
