"""What a session did and what it costs, for people: reports, timelines, pictures, notebooks."""
