"""`remediator execute`: process every open episode until it is closed."""
