"""From trajectories to what is trained on: samples, minibatches, packed micro-batches."""
