"""An RTSP camera on loopback: GStreamer's server. Run by Debian's Python, which has its bindings.

Prints its port. Serves 320 x 240 H.264 at 25 frames/s as /camera, for user "robot" with "secret".
"""

import sys

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # noqa: E402

PIPELINE = (
    "( videotestsrc is-live=true pattern=ball ! video/x-raw,width=320,height=240,framerate=25/1"
    " ! x264enc tune=zerolatency key-int-max=25 ! rtph264pay name=pay0 pt=96 )"
)

Gst.init(None)
auth = GstRtspServer.RTSPAuth()
token = GstRtspServer.RTSPToken()
token.set_string("media.factory.role", "camera")
auth.add_basic(GstRtspServer.RTSPAuth.make_basic("robot", "secret"), token)
factory = GstRtspServer.RTSPMediaFactory()
factory.set_launch(PIPELINE)
factory.set_shared(True)
factory.add_role_from_structure(
    Gst.Structure.from_string(
        "camera, media.factory.access=(boolean)true, media.factory.construct=(boolean)true"
    )[0]
)
server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service(sys.argv[1] if len(sys.argv) > 1 else "0")
server.set_auth(auth)
server.get_mount_points().add_factory("/camera", factory)
server.attach(None)
print(server.get_bound_port(), flush=True)  # noqa: T201
GLib.MainLoop().run()
