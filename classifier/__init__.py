"""Says what the samples mean: features, model, smoothing, detectors, and the simulator that trains them."""
