"""Containers from Docker, Podman, Kubernetes and systemd, and their cgroups."""
