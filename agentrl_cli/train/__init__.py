"""Learning from trajectories: samples, advantages, losses, learner, checkpoints, the loop."""
