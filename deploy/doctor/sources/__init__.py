"""What `gpuwarden doctor` reads: settings, files, databases, and the HTTP interfaces of the parts."""
