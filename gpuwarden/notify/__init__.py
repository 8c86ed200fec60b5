"""Addresses of notifications, and the program that sends one message to one address."""
