"""Training state as algorithms see it: buckets of tensors, the model, and state kept between steps."""
