"""The rooms the programs are set up in: real parts found or unpacked, a Docker engine, a worker image."""
