"""The parts of `benchmarks/train_reward.py`: pairs, backbone, training, package, evaluation."""
