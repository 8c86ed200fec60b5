"""GPU readings: NVIDIA by NVML, AMD and Intel by the kernel, or simulated."""
