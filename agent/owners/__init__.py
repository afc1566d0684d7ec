"""Who holds each GPU: job files, pods, and the cgroups of the processes there."""
