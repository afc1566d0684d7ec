"""Names of the pods that hold GPUs, from the kubelet's pod-resources service; in the extra `warpwatch[kubernetes]`."""
