"""Options and environment of the remediator, its policy file, and their reference pages."""
