"""What people look at: images, tables and pages made from maps and scores."""
