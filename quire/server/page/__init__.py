"""The page at `/`: static files, which read the API and the paths below /debug. Made without a build step."""
