"""AMD and Intel GPUs by sysfs, kfd and fdinfo."""
