"""`make demo`: the product's main job, shown with real parts on this host."""
