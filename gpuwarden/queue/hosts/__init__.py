"""Lost hosts, and the tokens of hosts."""
