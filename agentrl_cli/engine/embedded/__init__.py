"""The engine inside the trainer's process: transformers continuous batching, on CPU or CUDA."""
