"""What both front ends stand on: units, trees and torch's objects over their memory."""
