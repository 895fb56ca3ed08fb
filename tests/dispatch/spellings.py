"""Spellings of callback URLs that must be refused."""
# ruff: noqa: RUF001 - what looks alike is what this is about

from __future__ import annotations

from taskqueue_core.limits import LIMITS

HOSTS = """
127.0.0.1 127.1 127.0.1 127.0.0.1. 127.000.000.001 127.255.255.254
2130706433 017700000001 0x7f000001 0x7F.0.0.1 0x7f.1 0177.0.0.1 0177.0.0.01 00000177.1 127.0.0.0x1
0 0.0.0.0 0x0 00 0.0 0.1.2.3
localhost LOCALHOST localhost. localhost.localdomain ip6-localhost
10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 192.168.255.255
169.254.169.254 169.254.0.1 0xa9fea9fe 2852039166 0251.0376.0251.0376 169.254.43518 168.63.129.16
100.64.0.1 100.100.100.200 100.127.255.255
224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
192.0.0.1 192.0.0.192 192.0.2.1 198.51.100.7 203.0.113.9 198.18.0.1 198.19.255.255 192.88.99.1
[::] [::1] [0:0:0:0:0:0:0:1] [0000:0000:0000:0000:0000:0000:0000:0001] [::0.0.0.1]
[::127.0.0.1] [::ffff:127.0.0.1] [::ffff:7f00:1] [::FFFF:169.254.169.254] [::ffff:0:127.0.0.1] [::ffff:8.8.8.8]
[64:ff9b::127.0.0.1] [64:ff9b::169.254.169.254] [64:ff9b::a9fe:a9fe] [64:ff9b::8.8.8.8] [64:ff9b:1::10.0.0.1]
[2002:7f00:1::] [2002:a9fe:a9fe::1] [2002:808:808::1] [2001::1] [2001:0:4136:e378:8000:63bf:3fff:fdd2]
[2001:db8::1] [3fff::1] [2001:2::1] [2001:10::1] [100::1] [5f00::1]
[fc00::1] [fd00:ec2::254] [fd20:ce::254] [fe80::1] [fe80::5efe:127.0.0.1] [2606:4700::5efe:127.0.0.1]
[fe80::1%25eth0] [fe80::1%eth0] [fec0::1] [ff02::1] [ff0e::1]
[127.0.0.1] [::1 ::1] [] [::1]x [v1.a] [:::1]
127.0.0.1@public.example public.example@127.0.0.1 public.example:x@127.0.0.1 @127.0.0.1 :@127.0.0.1
public.example\\@127.0.0.1 127.0.0.1\\@public.example 127.0.0.1\\.public.example 127.0.0.1%2523@public.example
127.0.0.1%00.public.example 127.0.0.1%09 %31%32%37.0.0.1 %6c%6f%63%61lhost 127.0.0.1;public.example
127。0。0。1 127．0．0．1 127｡0｡0｡1 １２７.0.0.1 ①②⑦.⓪.⓪.① ⓛocalhost loc\u00adalhost \u200b127.0.0.1 127.0.0.1\u3002
ｌocalhost localho\u017ft \u0661\u0662\u0667.0.0.1
public..example .public.example -public.example public-.example a.-b.example 1.2.3 1.2.3.4.5 256.1.1.1 1.2.3.4x.5
""".split()  # noqa: SIM905 - a hundred quoted strings would be harder to read
"""a hundred quoted strings would be harder to read"""
WHOLE = [
    "", "/", "//127.0.0.1/", "127.0.0.1", "http:127.0.0.1", "http:/127.0.0.1", "http:///127.0.0.1",
    "file:///etc/passwd", "ftp://public.example/", "gopher://127.0.0.1:6379/_PING", "ws://public.example/",
    "javascript:alert(1)", "data:text/plain,x", "unix:/run/docker.sock", "HTTP+UNIX://x/", "jar:http://public.example!/",
    "https://public.example#x", "https://public.example/#x", "https://public.example/a b", "https://public.example/\tx",
    "https://public.example/\r\nHost: x", "https://pub\nlic.example/", "\thttps://public.example/",
    "https://public.example/ ",
    "https://public.example\t/", "https://public.example/é", "https://public.example/\x00", "https://public.example\\x",
    "https://public.example/\\x", "https://public.example:", "https://public.example:/", "https://public.example:0/",
    "https://public.example:-1/", "https://public.example:+443/", "https://public.example:0443/",
    "https://public.example:65536/", "https://public.example:99999999999999999999/", "https://public.example:4 43/",
    "https://public.example:443:443/", "https://public.example:４４３/", "https://public.example?<x>",
    'https://public.example/"',
    "https://user@public.example/", "https://user:word@public.example/", "https://@public.example/",
    "https:// public.example/",
    "https://public.example/" + "x" * LIMITS.url, "https://" + "a." * 127 + "example/",
    "https://" + "a" * 64 + ".example/",
]  # fmt: skip
"""URLs that are not plain https URLs"""
