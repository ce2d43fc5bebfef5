"""Studies: many runs in one device's spare minutes, and the tables that compare them."""
