"""What people look at: pictures, tables and pages made from maps and scores."""
