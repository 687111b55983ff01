"""The models in training: policy, critic, optimizer, attention, output head, shards."""
