"""Ray Tune as heats uses it: searcher, scheduler, and the loop over trials."""
